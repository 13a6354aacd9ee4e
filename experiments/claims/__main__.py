"""`python -m experiments.claims`: write `docs/claims.md`."""

from experiments.claims.page import PAGE, write_page

if __name__ == "__main__":
    write_page()
    print(PAGE)
