-- What the start of an effect has reserved, with its row: a dimension without a limit has no reservation of its own, and a
-- dispatch that is lost counts all the same.
ALTER TABLE effects ADD COLUMN estimate_json TEXT;

-- Asked for by every claim (compare 0003).
CREATE INDEX approvals_future ON approvals (run_id, format_version) WHERE format_version > 1;
CREATE INDEX reconciliations_future ON effect_reconciliations (run_id, format_version) WHERE format_version > 1;
