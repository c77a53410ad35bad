-- The declared files of an attempt as they were when its effect was confirmed: a later delivery keeps these or none.
ALTER TABLE attempts ADD COLUMN artifact_sources_json TEXT;
