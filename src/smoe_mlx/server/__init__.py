"""A local server, a console chat, and the sessions that both keep."""
