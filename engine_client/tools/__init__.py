"""Tools around the client: the reference engine, the launcher and its supervisor process."""
