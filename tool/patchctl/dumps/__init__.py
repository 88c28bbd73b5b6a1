"""What a patched run wrote: its two logs read, its dumps paired and compared, a report. Knows nothing of patches."""
