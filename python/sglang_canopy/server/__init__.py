"""SGLang's start-up, and the way of a request into the server."""
