-- Full text of what was said and thought. Trigrams find any part of a word, and of
-- languages that put no spaces between words.

CREATE VIRTUAL TABLE turn_text USING fts5 (
    content, thinking, content = 'turns', content_rowid = 'turn_key', tokenize = 'trigram'
);

CREATE TRIGGER turn_added AFTER INSERT ON turns BEGIN
    INSERT INTO turn_text (rowid, content, thinking)
    VALUES (new.turn_key, new.content, new.thinking);
END;

CREATE TRIGGER turn_removed AFTER DELETE ON turns BEGIN
    INSERT INTO turn_text (turn_text, rowid, content, thinking)
    VALUES ('delete', old.turn_key, old.content, old.thinking);
END;

CREATE TRIGGER turn_changed AFTER UPDATE OF content, thinking ON turns BEGIN
    INSERT INTO turn_text (turn_text, rowid, content, thinking)
    VALUES ('delete', old.turn_key, old.content, old.thinking);
    INSERT INTO turn_text (rowid, content, thinking)
    VALUES (new.turn_key, new.content, new.thinking);
END;

INSERT INTO turn_text (turn_text) VALUES ('rebuild');
