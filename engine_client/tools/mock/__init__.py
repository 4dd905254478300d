"""The parts of the reference engine; :mod:`engine_client.tools.mock_engine` puts them together."""
