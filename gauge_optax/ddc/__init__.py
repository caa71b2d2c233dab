"""The Adam and the Muon of *Dead-Direction Conditioners*: this library's (`plain`), the paper's (`printed`), and a
version of the first that needs less memory (`fused`).
"""
