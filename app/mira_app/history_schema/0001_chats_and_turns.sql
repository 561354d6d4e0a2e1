-- Chats, each a tree of turns. Turns are added and never changed.

CREATE TABLE chats (
    chat_id       TEXT PRIMARY KEY,
    title         TEXT NOT NULL,
    model         TEXT NOT NULL,
    system_prompt TEXT NOT NULL,
    sampling      TEXT,               -- JSON of SamplingConfig
    head_id       INTEGER,            -- where the chat stands
    updated_us    INTEGER NOT NULL,   -- microseconds since 1970, UTC
    deleted_us    INTEGER,            -- set until the chat is restored or purged
    FOREIGN KEY (chat_id, head_id) REFERENCES turns (chat_id, turn_id)
        DEFERRABLE INITIALLY DEFERRED
);

CREATE INDEX chats_by_time ON chats (updated_us);

CREATE TABLE turns (
    turn_key  INTEGER PRIMARY KEY,    -- what the full-text index refers to
    chat_id   TEXT NOT NULL REFERENCES chats (chat_id) ON DELETE CASCADE
        DEFERRABLE INITIALLY DEFERRED,
    turn_id   INTEGER NOT NULL CHECK (turn_id >= 0),
    parent_id INTEGER CHECK (parent_id < turn_id),
    role      TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    content   TEXT NOT NULL,
    thinking  TEXT NOT NULL,
    status    TEXT NOT NULL CHECK (status IN ('complete', 'stopped', 'error')),
    error     TEXT NOT NULL,
    model     TEXT NOT NULL,
    stats     TEXT,                   -- JSON of ReplyStats
    UNIQUE (chat_id, turn_id),
    FOREIGN KEY (chat_id, parent_id) REFERENCES turns (chat_id, turn_id)
        DEFERRABLE INITIALLY DEFERRED
);

-- Where the app is to go on when it is started again.
CREATE TABLE state (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
