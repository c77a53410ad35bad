-- Long-term memory: values by namespace and key that outlive the runs. `value_json` is the entry, `terms` its distinct
-- tokens between blanks, `embedding` its vector as little-endian doubles; both are made anew by a reindex. A row whose
-- time is over is as good as absent; the care of the store removes it later.
CREATE TABLE long_term_memory (
    namespace            TEXT NOT NULL CHECK (namespace <> ''),
    memory_key           TEXT NOT NULL CHECK (memory_key <> ''),
    format_version       INTEGER NOT NULL,
    value_json           TEXT NOT NULL,
    terms                TEXT NOT NULL,
    embedding_provider   TEXT NOT NULL,
    embedding_dimensions INTEGER NOT NULL,
    embedding            BLOB NOT NULL,
    expires_at           INTEGER,
    created_at           INTEGER NOT NULL,
    updated_at           INTEGER NOT NULL,
    PRIMARY KEY (namespace, memory_key),
    CHECK (length(embedding) = 8 * embedding_dimensions)
) STRICT;

CREATE INDEX long_term_memory_ending ON long_term_memory (expires_at) WHERE expires_at IS NOT NULL;
