"""The errors that fodp raises: one kind for each person who can mend them (docs/errors.md has examples)."""


class PrivacyError(ValueError):
    """Something that would make the stated guarantee false, or that cannot be run as asked.

    Most are of one of four kinds, which tell who can mend them; docs/errors.md has examples.
    """


class ConfigurationError(PrivacyError):
    """An argument, option, model, loss or optimizer that does not fit: change the code or the command."""


class DataError(PrivacyError):
    """Data that cannot be read or trained on as it is: look at the files or the records."""


class LedgerError(PrivacyError):
    """A ledger or checkpoint that is missing, damaged, foreign or in use: restore it, or take the right one."""


class BudgetError(PrivacyError):
    """The budget or target ε does not allow this: wait, ask for less, or raise the limit if you may."""
