"""Can facts in a store be inserted, corrected and deleted at run time?"""
