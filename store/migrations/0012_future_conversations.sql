-- Records of conversations that a newer agentctl has written, found without a look at the others (compare 0003).
CREATE INDEX provider_sessions_future ON provider_sessions (run_id, format_version) WHERE format_version > 1;
CREATE INDEX stream_events_future ON stream_events (run_id, format_version) WHERE format_version > 1;
