# SPDX-License-Identifier: Apache-2.0
"""What starts a run elsewhere: ssh, Slurm, Ray, Kubernetes. One file each, behind the seam of `engine.py`."""
