-- Sessions with remote servers, and the calls that were sent through a protocol (MCP, A2A).

-- The last session of a task. `generation` counts how often one was made; `state_json` says with whom, and under which
-- protocol version.
CREATE TABLE protocol_sessions (
    run_id         TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    task_id        TEXT NOT NULL,
    protocol       TEXT NOT NULL CHECK (protocol IN ('mcp', 'a2a')),
    format_version INTEGER NOT NULL,
    peer           TEXT NOT NULL,
    status         TEXT NOT NULL CHECK (status IN ('initialized', 'reinitialized', 'recorded')),
    generation     INTEGER NOT NULL CHECK (generation > 0),
    state_json     TEXT NOT NULL,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    PRIMARY KEY (run_id, task_id, protocol),
    CHECK (status <> 'initialized' OR generation = 1),
    CHECK (status <> 'reinitialized' OR generation > 1)
) STRICT, WITHOUT ROWID;

-- What is known of the remote side of an effect. It is written before something is sent, as soon as a remote task has
-- a name, and together with the end of the effect. `recorded` are copies in a replay, under ids of their own.
CREATE TABLE protocol_calls (
    effect_id      TEXT PRIMARY KEY,
    format_version INTEGER NOT NULL,
    run_id         TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    task_id        TEXT NOT NULL,
    protocol       TEXT NOT NULL CHECK (protocol IN ('mcp', 'a2a')),
    peer           TEXT NOT NULL,
    call_identity  TEXT NOT NULL,
    status         TEXT NOT NULL CHECK (status IN ('prepared', 'submitting', 'polling', 'cancellation_requested',
                   'succeeded', 'failed', 'uncertain', 'recorded')),
    state_json     TEXT NOT NULL,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    CHECK (protocol <> 'mcp' OR status NOT IN ('submitting', 'polling', 'cancellation_requested')),
    CHECK (protocol <> 'a2a' OR status <> 'prepared')
) STRICT;

CREATE INDEX protocol_calls_of_run ON protocol_calls (run_id);

CREATE TRIGGER protocol_calls_identity BEFORE UPDATE ON protocol_calls
WHEN NEW.call_identity IS NOT OLD.call_identity OR NEW.protocol IS NOT OLD.protocol OR NEW.peer IS NOT OLD.peer
BEGIN SELECT RAISE(ABORT, 'a call is about one thing for ever'); END;

CREATE INDEX protocol_sessions_future ON protocol_sessions (run_id, format_version) WHERE format_version > 1;
CREATE INDEX protocol_calls_future ON protocol_calls (run_id, format_version) WHERE format_version > 1;
