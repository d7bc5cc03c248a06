"""In the place of docker, podman or apptainer: it notes what it was told, and runs the program as they would, but in no
container. Its name on PATH says whom it stands in for; STAND_IN is its file of notes."""

import json
import os
import sys


def main(tool: str, arguments: list[str]) -> None:
    with open(os.environ["STAND_IN"], "a", encoding="utf-8") as file:
        file.write(json.dumps([tool, *arguments]) + "\n")
    if arguments[0] not in ("run", "exec"):
        sys.exit(arguments[-1] == "absent" and arguments[0] == "image")
    # The image is the first word that is no option and no option's value.
    alone, place = {"--rm", "--interactive", "--containall", "--no-privs"}, 1
    inside = dict[str, str]()
    while arguments[place].startswith("--"):
        option, value = arguments[place], arguments[place + 1]
        place += 1 if option in alone else 2
        if option in ("--volume", "--bind") and value.endswith(":/work"):
            os.chdir(value.removesuffix(":/work"))
        if option == "--env":
            inside[value] = os.environ[value]
    if tool == "apptainer":
        inside = {name[13:]: value for name, value in os.environ.items() if name.startswith("APPTAINERENV_")}
    command = arguments[place + 1 :]
    os.execvpe(command[0], command, {"PATH": os.environ["PATH"], **inside})


if __name__ == "__main__":
    main(os.path.basename(sys.argv[0]), sys.argv[1:])
