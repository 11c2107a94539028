"""One cell in processes of its own: started, supervised, ended, judged."""
