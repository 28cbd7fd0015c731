"""Text for training: conversations to token records, and records to packed draft blocks."""
