"""What models say while they say it: the stored events of streamed answers, shown as they come (contract 12.7).

People read the text on stderr, line by line with the name of its task, so that stdout stays what it is. Programs with
`--output jsonl` get one StreamEvent for each; with `--output json` they get none.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from .render import clean, envelope

if TYPE_CHECKING:
    from agentctl.store.engine import Store
    from agentctl.store.views import StreamCursor, Views

    from .main import Settings

PAGE = 500
LINE = 100
"""A line that is longer is shown before its end has come."""


class StreamDisplay:
    """Shows the events of one run, each once."""

    def __init__(self, settings: Settings, store: Store, views: Views, run_id: str) -> None:
        self._views = views
        self._run_id = run_id
        self._lines = settings.output == "jsonl"
        self._shown = self._lines or not settings.json
        self._after: StreamCursor | None = None
        self._text: dict[tuple[str, int], str] = {}
        self._answer: dict[tuple[str, int], str] = {}
        if self._shown:
            models = json.loads(store.run_settings(run_id)[0]).get("models") or {}
            self._shown = any(agent["stream"] for agent in models.get("agents", {}).values())

    def show(self) -> None:
        """What has come since the last time. Raises OSError when the reader of stdout is gone."""
        while self._shown:
            events, self._after = self._views.stream_events(self._run_id, self._after, limit=PAGE)
            for event in events:
                if self._lines:
                    click.echo(envelope("StreamEvent", event))
                else:
                    self._take(event)
            if len(events) < PAGE:
                return

    def finish(self) -> None:
        """The rest, when no more will come."""
        self.show()
        for (task, _), text in self._text.items():
            if text:
                _say(task, text)
        self._text.clear()

    def _take(self, event: dict[str, Any]) -> None:
        key = (event["taskId"], event["attempt"])
        payload = event["payload"] if isinstance(event["payload"], dict) else {}
        text = self._text.get(key, "")
        if text and self._answer.get(key) != event["effectId"]:
            _say(event["taskId"], text)  # the answer before has ended without a line break
            text = ""
        self._answer[key] = event["effectId"]
        if isinstance(payload.get("text"), str):
            text += payload["text"]
        elif event["type"] == "stream.truncated":
            text += "\n(more of this answer is not shown)\n"
        *whole, rest = text.split("\n")
        for line in whole:
            _say(event["taskId"], line)
        while len(rest) > LINE:
            cut = rest.rfind(" ", 0, LINE) + 1 or LINE
            _say(event["taskId"], rest[:cut])
            rest = rest[cut:]
        self._text[key] = rest


def _say(task: str, line: str) -> None:
    click.echo(f"{clean(task)}| {clean(line)}", err=True)
