"""Several engines behind one address: who gets a request, and what becomes of it when its engine dies."""
