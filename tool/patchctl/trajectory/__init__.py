"""What a chat proxy's archive of a trial holds, as a page and in numbers."""
