-- Whoever takes or cancels a run asks first whether a newer agentctl has written anything of it. These indexes hold only
-- such records, so the question costs nothing however long the run is. When a version of records rises here, its index is
-- made anew with the new number.

CREATE INDEX tasks_future ON tasks (run_id, metadata_version) WHERE metadata_version > 1;
CREATE INDEX effects_future ON effects (run_id, format_version) WHERE format_version > 1;
CREATE INDEX checkpoints_future ON checkpoints (run_id, format_version) WHERE format_version > 1;
CREATE INDEX audit_events_future ON audit_events (run_id, event_version) WHERE event_version > 1;
