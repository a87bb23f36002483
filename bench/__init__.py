"""Load driver, peers, soak test and recorded results; see README.md. Not part of the installed package."""
