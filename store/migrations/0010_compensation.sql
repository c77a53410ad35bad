-- Failed runs whose declared compensation has to be started by whoever comes next. Written with the end of the run, and
-- removed with the creation of its compensation run: so it is started once, whoever dies in between.
CREATE TABLE compensations_due (
    run_id     TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
