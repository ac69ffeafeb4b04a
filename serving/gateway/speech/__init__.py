"""What the text of an answer says: content, thoughts and calls of tools, taken apart as it comes."""
