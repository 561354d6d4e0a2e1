"""What a checkpoint holds, expert formats, the store and its preparation."""
