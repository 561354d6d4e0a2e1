"""Effects: slots, transfers, disk readers, expert executor, draft, verification."""
