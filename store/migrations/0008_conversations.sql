-- Conversations with models: where one can be continued, and what a streamed answer has told on its way.

-- The latest answer of a task's agent, and what the provider wants to be told with the next request. A new attempt and
-- a new run begin without one.
CREATE TABLE provider_sessions (
    run_id            TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    task_id           TEXT NOT NULL,
    format_version    INTEGER NOT NULL,
    provider          TEXT NOT NULL,
    attempt           INTEGER NOT NULL,
    effect_id         TEXT NOT NULL,
    continuation_json TEXT,
    updated_at        INTEGER NOT NULL,
    PRIMARY KEY (run_id, task_id)
) STRICT, WITHOUT ROWID;

-- Events of streamed answers, each stored before more of the stream is read; numbered from 1 in each attempt.
CREATE TABLE stream_events (
    run_id          TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    task_id         TEXT NOT NULL,
    attempt         INTEGER NOT NULL,
    sequence        INTEGER NOT NULL CHECK (sequence > 0),
    format_version  INTEGER NOT NULL,
    effect_id       TEXT NOT NULL,
    event_type      TEXT NOT NULL,
    payload_json    TEXT NOT NULL,
    source_run_id   TEXT,
    source_sequence INTEGER,
    created_at      INTEGER NOT NULL,
    PRIMARY KEY (run_id, task_id, attempt, sequence)
) STRICT, WITHOUT ROWID;

CREATE INDEX stream_events_of_run ON stream_events (run_id, created_at);
