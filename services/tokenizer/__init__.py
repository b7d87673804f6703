"""Text or chats to token ids and prefix keys."""
