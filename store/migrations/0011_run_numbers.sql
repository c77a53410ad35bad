-- Runs in the order in which they were created, by numbers that are never used again: whoever follows the audit trail of
-- all runs remembers how far it has come by one number. Times cannot do that (clocks are set), and neither can row ids
-- (the collection of old runs rewrites them).
CREATE TABLE run_numbers (
    run_no INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL UNIQUE REFERENCES runs ON DELETE CASCADE
) STRICT;

INSERT INTO run_numbers (run_id) SELECT run_id FROM runs ORDER BY created_at, run_id;

CREATE TRIGGER runs_numbered AFTER INSERT ON runs
BEGIN INSERT INTO run_numbers (run_id) VALUES (NEW.run_id); END;
