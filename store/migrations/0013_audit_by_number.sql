-- The audit trail as a table by number: a new event goes behind the last one of its run without a second tree to keep in
-- order, and without a look at the run for each of them. Whoever appends has updated the run's row in the same transaction,
-- so it is there; who removes a run removes its trail with it (the trigger does what the foreign key did).
-- Bits 36 and above are the number of the run, which is never used again, those below the sequence within the run.
ALTER TABLE runs ADD COLUMN audit_base INTEGER NOT NULL DEFAULT 0;

UPDATE runs SET audit_base = (SELECT run_no << 36 FROM run_numbers n WHERE n.run_id = runs.run_id);

DROP TRIGGER runs_numbered;
CREATE TRIGGER runs_numbered AFTER INSERT ON runs BEGIN
    INSERT INTO run_numbers (run_id) VALUES (NEW.run_id);
    UPDATE runs SET audit_base = (SELECT run_no << 36 FROM run_numbers n WHERE n.run_id = NEW.run_id)
        WHERE run_id = NEW.run_id;
END;

CREATE TABLE audit_by_number (
    event_no      INTEGER PRIMARY KEY CHECK (event_no > 68719476735 AND event_no & 68719476735 > 0),
    run_id        TEXT NOT NULL,
    sequence      INTEGER GENERATED ALWAYS AS (event_no & 68719476735) VIRTUAL,
    event_version INTEGER NOT NULL,
    event_type    TEXT NOT NULL,
    task_id       TEXT,
    actor         TEXT NOT NULL,
    trace_id      TEXT NOT NULL,
    payload_json  TEXT NOT NULL,
    created_at    INTEGER NOT NULL
) STRICT;

INSERT INTO audit_by_number
    (event_no, run_id, event_version, event_type, task_id, actor, trace_id, payload_json, created_at)
SELECT r.audit_base + a.sequence, a.run_id, a.event_version, a.event_type, a.task_id, a.actor, a.trace_id,
    a.payload_json, a.created_at
FROM runs r JOIN audit_events a ON a.run_id = r.run_id ORDER BY 1;

DROP TABLE audit_events;
ALTER TABLE audit_by_number RENAME TO audit_events;

CREATE INDEX audit_events_future ON audit_events (run_id, event_version) WHERE event_version > 1;
CREATE TRIGGER audit_events_no_update BEFORE UPDATE ON audit_events
BEGIN SELECT RAISE(ABORT, 'audit events are append-only'); END;
CREATE TRIGGER audit_events_no_delete BEFORE DELETE ON audit_events
WHEN EXISTS (SELECT 1 FROM runs WHERE run_id = OLD.run_id)
BEGIN SELECT RAISE(ABORT, 'audit events are append-only'); END;
CREATE TRIGGER runs_take_their_trail AFTER DELETE ON runs
BEGIN DELETE FROM audit_events WHERE event_no BETWEEN OLD.audit_base AND OLD.audit_base + 68719476735; END;
