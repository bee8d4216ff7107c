# SPDX-License-Identifier: Apache-2.0
"""What starts a run elsewhere: ssh, Slurm, Ray, Kubernetes. Each has the interface of `engine.py`."""
