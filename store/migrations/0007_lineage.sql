-- Where a run and its tasks come from: retry, repair, replay, fork and compensation.

-- `{formatVersion, sourceWorkflowDigest, roots, reason, failedOnly, ...}`: why and how a run was derived; null for others.
ALTER TABLE runs ADD COLUMN lineage_json TEXT;

CREATE INDEX runs_of_source ON runs (source_run_id) WHERE source_run_id IS NOT NULL;
CREATE INDEX runs_of_parent ON runs (parent_run_id) WHERE parent_run_id IS NOT NULL;

-- No foreign keys: a source may be deleted, what was taken from it stays.
ALTER TABLE tasks ADD COLUMN source_run_id TEXT;
ALTER TABLE tasks ADD COLUMN source_task_id TEXT;
ALTER TABLE tasks ADD COLUMN source_attempt INTEGER;
ALTER TABLE tasks ADD COLUMN reuse_decision_json TEXT;
