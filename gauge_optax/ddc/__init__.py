"""The Adam and the Muon of *Dead-Direction Conditioners*: plain, as printed, and with less memory."""
