-- Approvals, reconciliations and tool calls; and attempts that wait without holding a place.

-- SQLite cannot change a CHECK, so the table is made anew. Foreign keys are off meanwhile (`migrate`).
-- `hold` says why a `ready` attempt is not in the queue: `approval` (a person decides), `budget` (units that others
-- hold; `hold_json` says how many of which) or `place` (it may go on as soon as its driver gives it a place).
CREATE TABLE attempts_2 (
    attempt_id       INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id           TEXT NOT NULL,
    task_no          INTEGER NOT NULL REFERENCES tasks ON DELETE CASCADE,
    task_id          TEXT NOT NULL,
    number           INTEGER NOT NULL CHECK (number > 0),
    state            TEXT NOT NULL CHECK (state IN ('ready', 'claimed', 'finished', 'waiting', 'closed')),
    queue            TEXT,
    live_task        INTEGER UNIQUE,
    hold             TEXT CHECK (hold IN ('approval', 'budget', 'place')),
    hold_json        TEXT,
    holder           TEXT,
    delivery         INTEGER NOT NULL DEFAULT 0,
    lost             INTEGER NOT NULL DEFAULT 0,
    lost_effects     INTEGER NOT NULL DEFAULT 0,
    lease_expires_at INTEGER,
    timeout_ms       INTEGER NOT NULL,
    input_json       TEXT NOT NULL,
    outcome          TEXT CHECK (outcome IN ('succeeded', 'failed', 'uncertain', 'cancelled')),
    result_json      TEXT,
    result_effect    TEXT,
    error_json       TEXT,
    enqueued_at      INTEGER NOT NULL,
    claimed_at       INTEGER,
    finished_at      INTEGER,
    UNIQUE (task_no, number),
    CHECK (live_task IS CASE WHEN state <> 'closed' THEN task_no END),
    CHECK (queue IS CASE WHEN state IN ('claimed', 'finished') OR state = 'ready' AND hold IS NULL THEN state END),
    CHECK (hold IS NULL OR state = 'ready'),
    CHECK ((hold_json IS NOT NULL) = (hold IS 'budget')),
    CHECK ((state = 'claimed') = (lease_expires_at IS NOT NULL)),
    CHECK (state <> 'claimed' OR holder IS NOT NULL),
    CHECK ((state IN ('finished', 'waiting', 'closed')) = (outcome IS NOT NULL))
) STRICT;

INSERT INTO attempts_2 (attempt_id, run_id, task_no, task_id, number, state, queue, live_task, holder, delivery, lost,
    lost_effects, lease_expires_at, timeout_ms, input_json, outcome, result_json, result_effect, error_json,
    enqueued_at, claimed_at, finished_at)
SELECT attempt_id, run_id, task_no, task_id, number, state, queue, live_task, holder, delivery, lost,
    lost_effects, lease_expires_at, timeout_ms, input_json, outcome, result_json, result_effect, error_json,
    enqueued_at, claimed_at, finished_at
FROM attempts;

-- A number that was given once is never given again: it is part of every fence.
DELETE FROM sqlite_sequence WHERE name = 'attempts_2';
INSERT INTO sqlite_sequence (name, seq) SELECT 'attempts_2', seq FROM sqlite_sequence WHERE name = 'attempts';
DROP TABLE attempts;
ALTER TABLE attempts_2 RENAME TO attempts;

CREATE INDEX attempts_queue ON attempts (queue, run_id, task_no) WHERE queue IS NOT NULL;
CREATE INDEX attempts_held ON attempts (run_id, task_no, hold) WHERE hold IS NOT NULL;

-- A question to a person about exactly one action: `action_digest` covers what would be done. Decided once.
CREATE TABLE approvals (
    approval_id         TEXT PRIMARY KEY,
    format_version      INTEGER NOT NULL,
    run_id              TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    effect_id           TEXT NOT NULL UNIQUE,
    attempt_id          INTEGER NOT NULL,
    task_id             TEXT NOT NULL,
    agent               TEXT,
    tool                TEXT NOT NULL,
    capability          TEXT NOT NULL,
    risk                TEXT NOT NULL,
    action_digest       TEXT NOT NULL,
    redacted_input_json TEXT NOT NULL,
    expected_json       TEXT NOT NULL,
    reason              TEXT NOT NULL,
    trace_id            TEXT NOT NULL,
    requested_at        INTEGER NOT NULL,
    status              TEXT NOT NULL CHECK (status IN ('pending', 'approved', 'rejected', 'cancelled')),
    resolved_at         INTEGER,
    resolved_by         TEXT,
    resolution_reason   TEXT,
    CHECK ((status = 'pending') = (resolved_at IS NULL)),
    CHECK ((status = 'pending') = (resolved_by IS NULL))
) STRICT;

CREATE INDEX approvals_of_run ON approvals (run_id, requested_at);
CREATE INDEX approvals_pending ON approvals (requested_at) WHERE status = 'pending';

CREATE TRIGGER approvals_decided_once BEFORE UPDATE ON approvals
WHEN OLD.status <> 'pending' OR NEW.action_digest IS NOT OLD.action_digest OR NEW.effect_id IS NOT OLD.effect_id
BEGIN SELECT RAISE(ABORT, 'an approval is decided once, for one action'); END;

-- What a person (or a protocol) found out about an effect afterwards. The effect's own row never changes.
CREATE TABLE effect_reconciliations (
    reconciliation_no      INTEGER PRIMARY KEY,
    reconciliation_id      TEXT NOT NULL UNIQUE,
    format_version         INTEGER NOT NULL,
    effect_id              TEXT NOT NULL,
    run_id                 TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    status                 TEXT NOT NULL CHECK (status IN ('applied', 'not_applied', 'compensated')),
    actor                  TEXT NOT NULL CHECK (actor <> ''),
    reason                 TEXT NOT NULL CHECK (reason <> ''),
    evidence_json          TEXT NOT NULL,
    result_json            TEXT,
    result_schema_json     TEXT,
    authorization_json     TEXT NOT NULL,
    compensation_effect_id TEXT,
    supersedes_id          TEXT,
    trace_id               TEXT NOT NULL,
    created_at             INTEGER NOT NULL,
    CHECK (status <> 'applied' OR result_json IS NOT NULL),
    CHECK ((status = 'compensated') = (compensation_effect_id IS NOT NULL))
) STRICT;

CREATE INDEX reconciliations_of_effect ON effect_reconciliations (effect_id);
CREATE INDEX reconciliations_of_run ON effect_reconciliations (run_id);

CREATE TRIGGER effect_reconciliations_no_update BEFORE UPDATE ON effect_reconciliations
BEGIN SELECT RAISE(ABORT, 'reconciliations are append-only'); END;
CREATE TRIGGER effect_reconciliations_no_delete BEFORE DELETE ON effect_reconciliations
WHEN EXISTS (SELECT 1 FROM runs WHERE run_id = OLD.run_id)
BEGIN SELECT RAISE(ABORT, 'reconciliations are append-only'); END;

-- Calls of tools by a model. Their end is written in the transaction that ends their effect.
CREATE TABLE tool_calls (
    run_id        TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    effect_id     TEXT NOT NULL,
    call_id       TEXT NOT NULL,
    task_id       TEXT NOT NULL,
    tool_id       TEXT NOT NULL,
    input_digest  TEXT NOT NULL,
    output_digest TEXT,
    status        TEXT NOT NULL CHECK (status IN ('started', 'succeeded', 'failed', 'uncertain')),
    created_at    INTEGER NOT NULL,
    completed_at  INTEGER,
    PRIMARY KEY (run_id, effect_id, call_id),
    CHECK ((status = 'started') = (completed_at IS NULL))
) STRICT, WITHOUT ROWID;
