"""Parts of pages: tables, axes, formatted numbers and the HTML frame."""
