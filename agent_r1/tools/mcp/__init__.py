"""Tools of MCP servers (Model Context Protocol), through the official SDK. Imported only by runs that list a server."""
