"""Does a learned bias train better than its controls at equal parameters?"""
