"""Errors, as a tree. The type says whose fault it is; the message says expected, met, and what to do.

SegueError
├── StartError            the process cannot start: one sentence, exit status 1, no traceback
│   ├── ConfigError       a setting is unknown, of the wrong type or out of bounds
│   ├── ModelError        the model is missing, gated, unsupported or broken
│   └── TransferError     KV transfer is not available (nixl missing, self-fetch failed)
├── SmokeTestError        a deployment fails its test: unreachable, a broken stream, no KV moved, or open to strangers
├── RankError             another rank of this worker has ended, and so does this one
├── RequestError          the client's fault; carries the HTTP status and OpenAI's `param`
└── InvariantError        ours: a state that the design excludes; names the owner or the (state, event)
"""

from __future__ import annotations

import copy


class SegueError(Exception):
    """Base of every error that Segue raises on purpose."""


class StartError(SegueError):
    """The process cannot start."""


class ConfigError(StartError):
    """A setting is unknown, of the wrong type or out of bounds."""


class ModelError(StartError):
    """The model is missing, gated, unsupported or broken."""


class TransferError(StartError):
    """KV transfer is not available on this machine."""


class DoctorError(StartError):
    """`segue doctor` found what keeps a deployment from running."""


class SmokeTestError(SegueError):
    """A deployment fails its test: it is unreachable, its stream broke, no KV moved, or strangers reach its workers."""


class RankError(SegueError):
    """Another rank of this worker has ended, and so does this one."""


class RequestError(SegueError):
    """A request that can never be served as sent.

    `status` is the HTTP status, `param` the field at fault (None: the request as a whole), `code` OpenAI's
    machine-readable word (`context_length_exceeded`, …) or None.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def reworded(self, message: str, param: str | None) -> RequestError:
        """Copy the error in the words of another API, with all else that it carries."""
        same = copy.copy(self)
        same.args, same.message, same.param = (message,), message, param
        return same


class InvariantError(SegueError):
    """A state that the design excludes was met."""
