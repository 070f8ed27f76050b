def html(results, verdicts, charts):
    return ""
