"""The wire protocol without any input or output: messages, their bytes, the handshake's rules."""
