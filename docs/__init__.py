"""The site's sources: pages, and what writes the pages of public symbols."""
