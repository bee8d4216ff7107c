# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for client libraries that write down how they are called."""

from types import ModuleType


class Calls:
    """Any attribute is one more of its kind, and any call is appended to `record`, as `(name, args, kwargs)`."""

    def __init__(self, name, record, answers):
        self._name, self._record, self._answers = name, record, answers

    def __getattr__(self, name):
        return Calls(f"{self._name}.{name}" if self._name else name, self._record, self._answers)

    def __call__(self, *args, **kwargs):
        self._record.append((self._name, args, kwargs))
        return self._answers.get(self._name, self)


def fake_client(name, record, answers=None):
    """A module `name` whose functions and classes all write into `record`; `answers` says what some of them return."""

    class Fake(ModuleType):
        def __getattr__(self, attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return getattr(Calls("", record, answers or {}), attribute)

    return Fake(name)
