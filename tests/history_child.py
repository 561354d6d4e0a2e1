"""A process that writes to a history, for tests with several of them and for killing one.

`python history_child.py PATH NAME NUM_CHATS NUM_TURNS` opens the history, says `ready`,
waits for a line, and then says `saved CHAT NUM_TURNS` each time that a save returned. All
also write to the chat `shared`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mira_app import history_file
from mira_app.conversation import Conversation
from mira_app.history import HistoryStore, StoredChat


def main() -> None:
    history_file.BUSY_S = 300.0  # however long the other is at it on a slow disk
    path, name = Path(sys.argv[1]), sys.argv[2]
    num_chats, num_turns = int(sys.argv[3]), int(sys.argv[4])
    store = HistoryStore(path)
    for notice in store.open():
        print("notice", notice, flush=True)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(num_chats):
        chat_id = "shared" if number == 0 else f"{name}-{number}"
        chat = Conversation()
        while len(chat.turns) < num_turns:
            chat = chat.with_user(f"{name} asks {len(chat.turns)}")
            chat = chat.with_reply(f"{name} hears {len(chat.turns)} " + "word " * 200)
            store.save(StoredChat(chat_id=chat_id, conversation=chat))
            print("saved", chat_id, len(chat.turns), flush=True)
    store.close()


if __name__ == "__main__":
    main()
