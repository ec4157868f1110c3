"""Tables, figures and HTML pages of the results."""
