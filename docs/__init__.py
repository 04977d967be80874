"""What the documentation's generated pages and pictures are made with; the pages are Markdown files beside it."""
