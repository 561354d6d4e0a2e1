-- Where the chat stood on other branches, the one left last at the end: a JSON list of turns.

ALTER TABLE chats ADD COLUMN visited TEXT;
