"""A run as one HTML file, from the journals of one home or of several.

story.py   what the journal of a home tells
chart.py   lines as SVG
page.py    the file
write.py   writes it
"""
