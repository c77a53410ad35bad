-- Artifacts: blobs by digest, who is about to refer to one (ingests, with a lease), and who does (references).

CREATE TABLE artifact_blobs (
    digest     TEXT PRIMARY KEY CHECK (digest GLOB 'sha256:*' AND length(digest) = 71),
    size_bytes INTEGER NOT NULL CHECK (size_bytes >= 0),
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- What an attempt has ingested and its batch has not committed yet.
CREATE TABLE artifact_ingests (
    attempt_id   INTEGER NOT NULL REFERENCES attempts ON DELETE CASCADE,
    logical_path TEXT NOT NULL,
    run_id       TEXT NOT NULL,
    task_id      TEXT NOT NULL,
    digest       TEXT NOT NULL REFERENCES artifact_blobs,
    size_bytes   INTEGER NOT NULL,
    media_type   TEXT NOT NULL,
    logical_name TEXT NOT NULL,
    expires_at   INTEGER NOT NULL,
    PRIMARY KEY (attempt_id, logical_path)
) STRICT, WITHOUT ROWID;

CREATE INDEX artifact_ingests_of_blob ON artifact_ingests (digest);

-- A blob with a reference stays: the foreign key refuses to delete it, whoever tries.
CREATE TABLE artifact_refs (
    run_id         TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
    task_id        TEXT NOT NULL,
    logical_path   TEXT NOT NULL,
    digest         TEXT NOT NULL REFERENCES artifact_blobs,
    size_bytes     INTEGER NOT NULL,
    media_type     TEXT NOT NULL,
    logical_name   TEXT NOT NULL,
    source_run_id  TEXT,
    source_task_id TEXT,
    created_at     INTEGER NOT NULL,
    PRIMARY KEY (run_id, task_id, logical_path)
) STRICT, WITHOUT ROWID;

CREATE INDEX artifact_refs_of_blob ON artifact_refs (digest);

CREATE TRIGGER artifact_refs_no_update BEFORE UPDATE ON artifact_refs
BEGIN SELECT RAISE(ABORT, 'references to artifacts are immutable'); END;

-- The manifest of an attempt that has ingested; it moves to its task with the batch.
ALTER TABLE attempts ADD COLUMN artifacts_json TEXT;

ALTER TABLE tasks ADD COLUMN artifact_manifest_json TEXT;
ALTER TABLE tasks ADD COLUMN definition_fingerprint TEXT;
ALTER TABLE tasks ADD COLUMN output_contract_fingerprint TEXT;
