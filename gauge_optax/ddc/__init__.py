"""The Adam and the Muon of *Dead-Direction Conditioners*: this library's version (`plain`), the same with less memory
(`fused`), and the paper's version (`printed`).
"""
