"""Does a pass depend on nothing but its rows? Asked of passes as they are launched, captured ones above all."""
