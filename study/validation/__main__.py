from study.validation.command import main

raise SystemExit(main())
