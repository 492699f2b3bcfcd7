"""Environments on an OpenEnv server: `fn: "mmrl.rollout.environments.openenv:make"`.

Source: OpenEnv 685de41, `src/openenv/core/env_client.py` and `env_server/types.py`, as in openenv 0.10.0: JSON messages
over a WebSocket, one session for each connection. Departure: its single flag `done` counts as terminated.

The server must honour `seed`, or else the step needs `replayable: false`. It must accept as many sessions as there are
episodes (`max_concurrent_envs`). Needs the package `websockets`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from mmrl.rollout.environments.conversions import encode_picture
from mmrl.types import Action, Environment, Observation, Sample, StepResult, Unscorable, UserError

_ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # about an action; other codes are failures of the server


class OpenEnvSession:
    """Holds one session of a server."""

    def __init__(self, connect: Any, text: str, picture: str | None, action: str | None) -> None:  # noqa: ANN401
        """Open a connection; `text`, `picture` and `action` name fields of observations and actions."""
        self.resources = ExitStack()
        self.connection = self.resources.enter_context(connect)
        self.text, self.picture, self.action = text, picture, action

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin an episode of this seed."""
        answer = self._ask("reset", {"seed": seed % 2**31})
        if answer["type"] == "error":
            raise Unscorable(f"the server refuses to reset: {_describe_error(answer['data'])}")
        return self._observe(answer["data"]["observation"])

    def step(self, action: str | Action) -> StepResult:
        """Send an action: text in its field, or else the object that the model wrote as JSON."""
        data: Any = dict(action.arguments) if isinstance(action, Action) else {self.action: action}
        if self.action is None and isinstance(action, str):
            try:
                data = json.loads(action)
            except ValueError:
                data = None
        if not isinstance(data, dict):
            return StepResult(observation=Observation(text="An action is a JSON object."), valid=False)
        answer = self._ask("step", data)
        if answer["type"] == "error":
            text = _describe_error(answer["data"])
            if answer["data"].get("code") not in _ACTION_ERRORS:
                raise Unscorable(f"the server's session failed: {text}")
            # The model reads the server's message about its action, which may have been nonsense.
            return StepResult(observation=Observation(text=text), valid=False)
        answer = answer["data"]
        return StepResult(
            observation=self._observe(answer["observation"]),
            reward=float(answer.get("reward") or 0.0),
            terminated=bool(answer.get("done")),
        )

    def close(self) -> None:
        """End the session."""
        with self.resources:
            self.connection.send(json.dumps({"type": "close"}))

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        # A server without a free session sends an error and closes the connection; the error can still be read.
        with suppress(ConnectionClosed):
            self.connection.send(json.dumps({"type": kind, "data": data}))
        return dict(json.loads(self.connection.recv()))

    def _observe(self, fields: Mapping[str, Any]) -> Observation:
        picture = fields.get(self.picture) if self.picture else None  # BrowserGym's server sends nested lists of pixels
        media = (encode_picture(picture),) if picture else ()
        return Observation(text=str(fields.get(self.text) or ""), media=media)


def _describe_error(data: Mapping[str, Any]) -> str:
    """Return the message of an error, with the fields of the action that are wrong."""
    fields = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in data.get("errors", ())]
    return "; ".join([str(data.get("message")), *fields])


def make(*, url: str, text: str, picture: str | None = None, action: str | None = None) -> Environment:
    """Open a session at `url`, such as "ws://localhost:8000"; raises Unscorable if the server cannot be reached.

    Options:
        text: field of an observation that is shown as text.
        picture: field of an observation with a picture: pixels, or a PNG file in base64.
        action: field of an action that gets the model's text; without it the model writes the whole action as JSON.
    """
    try:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect
    except ImportError as error:
        raise UserError("the package websockets is missing; pip install websockets") from error
    address = url.replace("http", "ws", 1) if url.startswith("http") else url
    try:
        return OpenEnvSession(connect(f"{address.rstrip('/')}/ws", max_size=2**27), text, picture, action)
    except (OSError, WebSocketException) as error:
        raise Unscorable(f"{url} cannot be reached: {error}") from error
