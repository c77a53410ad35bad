-- The first schema. What is promised by the code is, where SQLite can say it, also promised by the database:
-- one live attempt per task, an end state has an end time, final states stay, history is append-only.

CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- Every process that ever opened the database to work: coordinators, supervisors, workers, foreground runs.
CREATE TABLE processes (
    process_id         TEXT PRIMARY KEY,
    kind               TEXT NOT NULL CHECK (kind IN ('worker', 'supervisor', 'coordinator', 'run')),
    name               TEXT NOT NULL,
    identity           TEXT NOT NULL,
    pid                INTEGER NOT NULL,
    parent_process_id  TEXT,
    only_run           TEXT,
    unit               TEXT,
    state              TEXT NOT NULL CHECK (state IN ('starting', 'idle', 'busy', 'draining', 'stopped', 'dead')),
    version            TEXT NOT NULL,
    started_at         INTEGER NOT NULL,
    heartbeat_at       INTEGER NOT NULL,
    drain_requested_at INTEGER,
    stopped_at         INTEGER,
    done               INTEGER NOT NULL DEFAULT 0,
    failed             INTEGER NOT NULL DEFAULT 0,
    rss_bytes          INTEGER NOT NULL DEFAULT 0,
    CHECK ((state IN ('stopped', 'dead')) = (stopped_at IS NOT NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX processes_live ON processes (kind, state) WHERE stopped_at IS NULL;

CREATE TABLE runs (
    run_id                  TEXT PRIMARY KEY,
    runtime_state_version   INTEGER NOT NULL,
    plan_format_version     INTEGER NOT NULL,
    workflow_name           TEXT NOT NULL,
    workflow_digest         TEXT NOT NULL,
    plan_digest             TEXT NOT NULL,
    mode                    TEXT NOT NULL CHECK (mode IN
                            ('execute', 'check', 'replay', 'fork', 'repair', 'retry', 'compensation')),
    state                   TEXT NOT NULL CHECK (state IN ('running', 'paused', 'succeeded', 'failed', 'cancelled')),
    reason                  TEXT,
    error_json              TEXT,
    trace_id                TEXT NOT NULL,
    priority                INTEGER NOT NULL CHECK (priority BETWEEN -10 AND 10),
    idempotency_key         TEXT UNIQUE,
    submission_digest       TEXT NOT NULL,
    base_path               TEXT NOT NULL,
    parent_run_id           TEXT,
    source_run_id           TEXT,
    first_task              INTEGER NOT NULL,
    task_count              INTEGER NOT NULL CHECK (task_count > 0),
    max_concurrency         INTEGER NOT NULL,
    max_deliveries          INTEGER NOT NULL,
    deadline_at             INTEGER,
    cancel_requested_at     INTEGER,
    cancel_reason           TEXT,
    pause_requested_at      INTEGER,
    pause_reason            TEXT,
    revision                INTEGER NOT NULL DEFAULT 0,
    epoch                   INTEGER NOT NULL DEFAULT 0,
    driver                  TEXT,
    driver_lease_expires_at INTEGER,
    audit_sequence          INTEGER NOT NULL DEFAULT 0,
    checkpoint_sequence     INTEGER NOT NULL DEFAULT 0,
    checkpoint_checksum     TEXT NOT NULL DEFAULT '',
    created_at              INTEGER NOT NULL,
    updated_at              INTEGER NOT NULL,
    ended_at                INTEGER,
    CHECK ((state IN ('succeeded', 'failed', 'cancelled')) = (ended_at IS NOT NULL))
) STRICT;

CREATE INDEX runs_open ON runs (created_at) WHERE ended_at IS NULL;
CREATE INDEX runs_by_time ON runs (created_at);

CREATE TRIGGER runs_final BEFORE UPDATE OF state ON runs
WHEN OLD.ended_at IS NOT NULL AND NEW.state IS NOT OLD.state
BEGIN SELECT RAISE(ABORT, 'a run that has ended does not change its state'); END;

-- Large immutable texts stand apart, so that an update of a run's row never rewrites them.
CREATE TABLE run_documents (
    run_id        TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    workflow_json TEXT NOT NULL,
    plan_json     TEXT NOT NULL,
    inputs_json   TEXT NOT NULL,
    settings_json TEXT NOT NULL
) STRICT;

CREATE TABLE run_outputs (
    run_id      TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    output_json TEXT NOT NULL
) STRICT;

-- The numbers of a run's tasks are consecutive: task_no = runs.first_task + position. So a run's rows are one range
-- of the primary key, and a transition touches no other index.
CREATE TABLE tasks (
    task_no       INTEGER PRIMARY KEY,
    run_id        TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    task_id       TEXT NOT NULL,
    position      INTEGER NOT NULL,
    state         TEXT NOT NULL CHECK (state IN ('pending', 'ready', 'running', 'waiting_for_approval',
                  'waiting_for_effect', 'retry_scheduled', 'succeeded', 'failed', 'skipped', 'cancelled')),
    attempt       INTEGER NOT NULL DEFAULT 0,
    disposition   TEXT NOT NULL DEFAULT 'executed' CHECK (disposition IN ('executed', 'reused', 'recorded')),
    metadata_version INTEGER NOT NULL DEFAULT 1,
    input_digest  TEXT,
    output_json   TEXT,
    output_digest TEXT,
    error_json    TEXT,
    decision_json TEXT,
    delta_json    TEXT,
    delta_digest  TEXT,
    retry_at      INTEGER,
    started_at    INTEGER,
    ended_at      INTEGER,
    updated_at    INTEGER NOT NULL,
    UNIQUE (run_id, task_id),
    CHECK ((state IN ('succeeded', 'failed', 'skipped', 'cancelled')) = (ended_at IS NOT NULL)),
    CHECK ((state = 'retry_scheduled') = (retry_at IS NOT NULL))
) STRICT;

CREATE TRIGGER tasks_final BEFORE UPDATE OF state ON tasks
WHEN OLD.ended_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a task that has ended does not change its state'); END;

-- One try at a task. `delivery` counts its hand-overs to workers; (attempt_id, delivery, holder) is the fence.
-- `queue` and `live_task` repeat what `state` says, for the two indexes: a partial index on `state` itself would be
-- written anew at every move, whether it is concerned or not. The checks keep them equal.
CREATE TABLE attempts (
    attempt_id       INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id           TEXT NOT NULL,
    task_no          INTEGER NOT NULL REFERENCES tasks ON DELETE CASCADE,
    task_id          TEXT NOT NULL,
    number           INTEGER NOT NULL CHECK (number > 0),
    state            TEXT NOT NULL CHECK (state IN ('ready', 'claimed', 'finished', 'waiting', 'closed')),
    queue            TEXT,
    live_task        INTEGER UNIQUE,
    hold             TEXT CHECK (hold IN ('budget')),
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
    CHECK ((state = 'claimed') = (lease_expires_at IS NOT NULL)),
    CHECK (state <> 'claimed' OR holder IS NOT NULL),
    CHECK ((state IN ('finished', 'waiting', 'closed')) = (outcome IS NOT NULL))
) STRICT;

CREATE INDEX attempts_queue ON attempts (queue, run_id, task_no) WHERE queue IS NOT NULL;

-- Runs in the order in which they are next served.
CREATE TABLE turns (
    run_id   TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    priority INTEGER NOT NULL,
    turn     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX turns_order ON turns (priority DESC, turn);

CREATE TABLE effects (
    effect_no       INTEGER PRIMARY KEY,
    effect_id       TEXT NOT NULL UNIQUE,
    format_version  INTEGER NOT NULL,
    run_id          TEXT NOT NULL,
    task_id         TEXT NOT NULL,
    attempt_id      INTEGER NOT NULL REFERENCES attempts ON DELETE CASCADE,
    attempt         INTEGER NOT NULL,
    ordinal         INTEGER NOT NULL CHECK (ordinal > 0),
    operation       TEXT NOT NULL,
    effect_class    TEXT NOT NULL CHECK (effect_class IN ('pure', 'internal_state', 'observe', 'workspace_mutate',
                    'external_mutate', 'process_execution', 'network', 'model', 'remote_agent')),
    risk            TEXT NOT NULL CHECK (risk IN ('low', 'medium', 'high', 'critical')),
    idempotency     TEXT NOT NULL CHECK (idempotency IN ('pure', 'idempotent', 'keyed', 'at_most_once', 'unknown')),
    idempotency_key TEXT NOT NULL,
    input_digest    TEXT NOT NULL,
    input_json      TEXT NOT NULL,
    expected_json   TEXT NOT NULL,
    trace_id        TEXT NOT NULL,
    status          TEXT NOT NULL CHECK (status IN ('requested', 'waiting_for_approval', 'started', 'succeeded',
                    'failed', 'cancelled', 'uncertain')),
    dispatches      INTEGER NOT NULL DEFAULT 0,
    confirmed       INTEGER NOT NULL DEFAULT 0 CHECK (confirmed IN (0, 1)),
    superseded      INTEGER NOT NULL DEFAULT 0 CHECK (superseded IN (0, 1)),
    requested_at    INTEGER NOT NULL,
    started_at      INTEGER,
    completed_at    INTEGER,
    result_json     TEXT,
    error_json      TEXT,
    notes_json      TEXT,
    UNIQUE (attempt_id, ordinal),
    CHECK (confirmed = (status = 'succeeded')),
    CHECK (status NOT IN ('started', 'succeeded') OR started_at IS NOT NULL),
    CHECK ((status IN ('succeeded', 'failed', 'cancelled', 'uncertain')) = (completed_at IS NOT NULL))
) STRICT;

CREATE INDEX effects_uncertain ON effects (run_id) WHERE status = 'uncertain';

-- `uncertain` is final as well: what a person finds out later is appended as a reconciliation.
CREATE TRIGGER effects_final BEFORE UPDATE OF status ON effects
WHEN OLD.completed_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'an effect that has ended does not change its status'); END;

-- Working memory: immutable rows. A snapshot at position p is, for each key, the row of the greatest position below p.
CREATE TABLE memory_values (
    run_id     TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    key        TEXT NOT NULL,
    position   INTEGER NOT NULL,
    value_json TEXT,
    PRIMARY KEY (run_id, key, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE run_budgets (
    run_id                  TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    format_version          INTEGER NOT NULL,
    pricing_version         TEXT,
    exceeded_json           TEXT,
    planned_tasks           INTEGER NOT NULL,
    planned_expansion_items INTEGER NOT NULL,
    planned_loop_iterations INTEGER NOT NULL,
    updated_at              INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE budget_lines (
    run_id      TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    dimension   TEXT NOT NULL,
    limit_units INTEGER,
    used        INTEGER NOT NULL DEFAULT 0 CHECK (used >= 0),
    reserved    INTEGER NOT NULL DEFAULT 0 CHECK (reserved >= 0),
    PRIMARY KEY (run_id, dimension)
) STRICT, WITHOUT ROWID;

-- One reservation per effect, dispatch and dimension; an open one is part of budget_lines.reserved.
CREATE TABLE budget_reservations (
    run_id         TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    reservation_id TEXT NOT NULL,
    dispatch       INTEGER NOT NULL,
    dimension      TEXT NOT NULL,
    units          INTEGER NOT NULL CHECK (units >= 0),
    actual         INTEGER,
    state          TEXT NOT NULL CHECK (state IN ('open', 'settled', 'released')),
    PRIMARY KEY (run_id, reservation_id, dispatch, dimension)
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoints (
    run_id            TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    sequence          INTEGER NOT NULL,
    format_version    INTEGER NOT NULL,
    previous_checksum TEXT NOT NULL,
    checksum          TEXT NOT NULL,
    state_json        TEXT NOT NULL,
    created_at        INTEGER NOT NULL,
    PRIMARY KEY (run_id, sequence)
) STRICT;

CREATE TABLE audit_events (
    run_id        TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    sequence      INTEGER NOT NULL,
    event_version INTEGER NOT NULL,
    event_type    TEXT NOT NULL,
    task_id       TEXT,
    actor         TEXT NOT NULL,
    trace_id      TEXT NOT NULL,
    payload_json  TEXT NOT NULL,
    created_at    INTEGER NOT NULL,
    PRIMARY KEY (run_id, sequence)
) STRICT, WITHOUT ROWID;

-- History is append-only. Only the removal of a whole run (its row goes first) may take it along.
CREATE TRIGGER audit_events_no_update BEFORE UPDATE ON audit_events
BEGIN SELECT RAISE(ABORT, 'audit events are append-only'); END;
CREATE TRIGGER audit_events_no_delete BEFORE DELETE ON audit_events
WHEN EXISTS (SELECT 1 FROM runs WHERE run_id = OLD.run_id)
BEGIN SELECT RAISE(ABORT, 'audit events are append-only'); END;
CREATE TRIGGER checkpoints_no_update BEFORE UPDATE ON checkpoints
BEGIN SELECT RAISE(ABORT, 'checkpoints are append-only'); END;
CREATE TRIGGER checkpoints_no_delete BEFORE DELETE ON checkpoints
WHEN EXISTS (SELECT 1 FROM runs WHERE run_id = OLD.run_id)
BEGIN SELECT RAISE(ABORT, 'checkpoints are append-only'); END;
CREATE TRIGGER memory_values_no_update BEFORE UPDATE ON memory_values
BEGIN SELECT RAISE(ABORT, 'memory values are immutable'); END;
