"""Text or chats to token ids and prefix keys, in whichever process has the time."""
